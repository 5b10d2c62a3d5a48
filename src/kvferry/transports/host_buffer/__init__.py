"""host_buffer."""
