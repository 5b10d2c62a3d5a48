"""What the engine's front-end and the router answer alike over HTTP: errors in OpenAI's shape, also
for what is not HTTP.
"""
