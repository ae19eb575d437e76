"""Which release this is. Images carry the sources without the packages' metadata, so it stands here."""

VERSION = "0.1.0"
