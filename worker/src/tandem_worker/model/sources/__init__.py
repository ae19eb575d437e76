"""Sources of weights: a contract (`contract`) and one module per URI scheme; `resolve` is the way in."""
