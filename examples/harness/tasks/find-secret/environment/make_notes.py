import pathlib

folder = pathlib.Path("notes")
folder.mkdir()
for number in range(40):
    line = "code: 7319" if number == 23 else f"note {number}"
    (folder / f"{number}.txt").write_text(line + "\n")
