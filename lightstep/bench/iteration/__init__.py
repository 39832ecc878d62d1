"""`lightstep bench --iteration` and `--timeline`: whole training iterations, forward, backward and step.

`command` is what the command line runs. `shape` and `model` say what is trained, `contender`, `strategies` and `peers`
who trains it; `run` and `window` measure them, `report` and `chart` show the result. `timeline` records traces, `trace`
reads them and `lanes` draws them.
"""
