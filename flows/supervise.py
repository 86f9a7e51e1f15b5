"""Run a command that must not outlive whoever asked for it: python supervise.py COMMAND ARGUMENT...

Standard input is a pipe whose other end the caller holds. When it closes because the caller ended, even by SIGKILL, the command and everything it
started (this process's group) is ended. A lock that the caller handed over stays held until then. Exit status: the command's.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0


def main() -> int:
    """Run the command in `sys.argv`. Returns its exit status, 128 + signal where one ended it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a SIGTERM to the group is for the command; this process ends when the command has
    restore = lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)  # noqa: E731
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=restore)
    threading.Thread(target=end_with_caller, daemon=True).start()
    status = command.wait()
    return status if status >= 0 else 128 - status


def end_with_caller() -> None:
    """Wait until the caller's end of the pipe closes, then end the group: first asked, then forced."""
    while os.read(sys.stdin.fileno(), 1):  # unbuffered: a lock of the buffer would be in the way when this process ends
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
