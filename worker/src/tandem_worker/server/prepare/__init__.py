"""From the bytes of a request to token ids that are known to fit, without holding up other streams."""
