"""Property tests assert no time: on a busy machine a slow example says nothing about the code."""

from hypothesis import settings

settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")
