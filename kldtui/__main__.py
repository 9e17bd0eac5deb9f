"""The `kldtui` command, also as `python -m kldtui`: how it begins.

Knows: that loading takes a moment, in which Ctrl-C is to end it as it ends any other program.
Must not know: what there is to do (kldtui.cli does).
"""

import signal


def main() -> None:
    """Load the command line and run it."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a traceback out of an import, otherwise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kldtui.cli import main as run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
