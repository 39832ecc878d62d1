"""`lightstep bench`: strategies and peers side by side on this machine, each doing the same work.

`command` is what the command line runs. `contender` says what a contender and a task are; `step`, `iteration`, `tiny`
and `timeline` are the tasks, each with its figures and how they are shown; `strategies`, `peers`, `layer_stream` and
`libraries` hold the contenders, `entries` their names, `llama` what they train. `run` measures every contender in turn
with `probes`, `trace`, `link` and `disk`; `report` and `chart` show any result. `roles` measures memory in processes of
its own. Nothing else in lightstep imports this package.
"""
