"""`lightstep train CONFIG.yaml`: a language model, its text, and one strategy, from one file.

`config` reads the file. `data` turns text into tokens and selects those of each step. `model` builds the model, and
`optimization` its optimizer and scheduler. `session` puts the components together, `loop` trains, and `output` is what
a run writes and shows.
"""
