"""What holds for all tests."""

from hypothesis import settings

# Time never decides a test: on a busy machine any example may take long.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
