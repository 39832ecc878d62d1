"""`lightstep bench`: strategies and peers side by side on this machine, each doing the same optimizer step.

`command` is what the command line runs; `run` measures every contender in turn; `contender` says what a contender is,
and `strategies`, `peers`, `layer_stream` and `libraries` hold them; `model`, `link`, `measure` and `probes` are what
they are measured with; `report` and `chart` show the result. `iteration` measures whole training iterations instead.
Nothing else in lightstep imports this package.
"""
