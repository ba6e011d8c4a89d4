"""Side-by-side measurements of elastic_train, raw Ray Train and torchrun on one machine."""
