"""What a start has computed and the next one would compute again, kept beside the models: see `store`.

Nothing here imports torch: it is read while that is being imported.
"""
