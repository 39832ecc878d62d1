"""`lightstep bench`: strategies and other libraries measured side by side on this machine, doing the same work.

`command` is the command line. `contender` defines `Contender` and `Task`. The tasks are `step`, `iteration`, `tiny` and
`timeline`; each computes its own figures and says how to show them. `strategies`, `peers`, `layer_stream` and
`libraries` hold the contenders, `entries` parses their names, and `llama` is the model they train. `run` measures the
contenders in turn with `probes`, `trace`, `link` and `disk`. `report` and `chart` show the result of any task. `roles`
measures memory in processes of its own. Only the command line imports this package.
"""
