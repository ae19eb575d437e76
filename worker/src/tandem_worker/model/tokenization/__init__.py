"""Tokenizers: texts to ids and back, and chat templates, as transformers would have them and without loading it.

    tokenizer   what the worker uses of a tokenizer
    template    conversations to prompts, by a chat template
    folder      from the files of a checkpoint, where they say all there is to say
    gguf        from the metadata of a GGUF file, likewise
    conversion  from anything else, by transformers in a process of its own; the result is kept for the next start

Nothing here imports torch.
"""
