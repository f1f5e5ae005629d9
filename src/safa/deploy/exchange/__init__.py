"""Messages, codec, screening and identity: what a deployment decides, without a network."""
