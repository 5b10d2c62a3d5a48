"""The size of a model's KV cache and the time to transfer it: arithmetic for `kvferry plan`. Pure;
imports no heavy package.
"""
