"""The lowest layer of the package: terminal text, private files, secrets, lazy names, help for fields."""
