"""How large a model's KV cache is and how long it takes to move: arithmetic for `kvferry plan`.
Pure, and loads nothing heavy.
"""
