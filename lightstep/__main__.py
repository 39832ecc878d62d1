"""The console script `lightstep`, `python -m lightstep`, and `torchrun -m lightstep`."""

import io
import signal
import sys

from lightstep.extras import MissingLibraryError, needs


def main() -> None:
    """Run the command. If a library is missing, print one sentence that names the extra; exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # unsupported characters must not end a run
    try:
        with needs("bench" if sys.argv[1:2] == ["bench"] else "train"):
            from lightstep.cli import app

            app(prog_name="lightstep")
    except MissingLibraryError as error:
        sys.stderr.write(f"lightstep: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:  # during the import of the command
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # at its own exit Python would show a traceback and return 0


if __name__ == "__main__":
    main()
