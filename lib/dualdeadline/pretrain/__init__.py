"""How the embedded models are made: text packages -> cleaned documents -> tokens -> checkpoint."""
