"""The console script `lightstep`, `python -m lightstep`, and `torchrun -m lightstep`."""

import sys

from lightstep.extras import MissingLibraryError, needs


def main() -> None:
    """Run the command. If a library that it needs is not installed, one sentence names the extra; exit code 2."""
    try:
        with needs("bench" if sys.argv[1:2] == ["bench"] else "train"):
            from lightstep.cli import app

            app(prog_name="lightstep")
    except MissingLibraryError as error:
        sys.stderr.write(f"lightstep: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
