"""Documents to what people read. Text needs no run and no terminal, so that reports are tested on documents alone."""
