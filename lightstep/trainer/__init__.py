"""`lightstep train CONFIG.yaml`: a language model, its text, and one strategy, from one file.

`config` is the file; `documents` and `tokens` make text into tokens, `batches` decides which of them each step sees;
`model` builds what is trained; `session` puts the pieces together and `loop` trains; `ranks` and `interrupt` are what
several processes and signals need; `run_folder`, `logs`, `display` and `samples` are what a run leaves and shows.
"""
