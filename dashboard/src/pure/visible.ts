/** Characters that a page does not show, or that change the order of others (Unicode, UAX 9), as their numbers. */
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text: string): string {
  return text
    .replace(HIDDEN, (found) => `⟨U+${found.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`)
    .toWellFormed();
}

/** A name that somebody else gave, for one place of a page: nothing hidden, on one line, and cut where it is long. */
export function named(text: string, most = 200): string {
  const cut = text.length > most ? `${text.slice(0, most)}… (${text.length.toLocaleString("en-US")} characters)` : text;
  return visible(cut.replace(/[\t\r\n]+/g, " "));
}
