"""What storages hold, seen from outside the engines: for `kvferry store`."""
