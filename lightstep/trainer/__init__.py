"""`lightstep train CONFIG.yaml`: a language model, its text, and one strategy, from one file.

`config` reads the file. `documents` and `tokens` turn text into tokens, and `batches` selects those of each step.
`model` builds the model. `session` puts the components together, and `loop` trains. `ranks` handles several processes,
and `interrupt` signals. `run_folder`, `logs`, `display` and `samples` are the output of a run.
"""
