"""The bottom of the package: safe text, private files, secrets, lazy names, help for fields. Imports nothing of it."""
