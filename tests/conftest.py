"""What holds for all tests."""

import signal

from hypothesis import settings

# Time never decides a test: on a busy machine any example may take long.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# What a shell or nohup starts in the background ignores these signals, and so would every process that a test starts.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)
