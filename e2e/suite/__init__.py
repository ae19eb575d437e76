"""The suite that proves Tandem on a real cluster. One file a promise; what the files share is in `fleet` and `load`."""
