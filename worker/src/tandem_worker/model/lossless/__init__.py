"""Packed checkpoints: made, given back, verified. `python -m tandem_worker.model.lossless` is the tool.

The form of the files is in `checkpoint/packed_folder.py`, of a tensor in `checkpoint/split.py` (`fixed`: 12 bits a
weight, as the CPU kernels multiply it) and `checkpoint/exponents.py` (`archive`: smallest). Neither rounds anything.
"""
