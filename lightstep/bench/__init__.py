"""`lightstep bench`: strategies and other libraries measured side by side on this machine, doing the same work.

`command` is the command line. The tasks are `step`, `iteration` and `tensors`; each computes its own figures and says
how to show them. `contender` says what one is, and `strategies` and `peers` are the contenders; `llama` is the model
that they train. `run` measures them in turn on the `machine`, and `checkpoints` times their saves. `report` shows the
result of any task. Only the command line imports this package.
"""
