"""Where weights come from: a contract (`base`) and one module per URI scheme; `resolve` is the way in."""
