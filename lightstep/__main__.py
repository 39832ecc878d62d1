"""`python -m lightstep`, and `torchrun -m lightstep`."""

from lightstep.cli import app

if __name__ == "__main__":
    app(prog_name="lightstep")
