/** Characters that a page does not show, or that change the order of others (Unicode, UAX 9), as their numbers. */
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;
/** Joiners where writing needs them: between the parts of an emoji, and between letters that are joined or kept apart. */
const JOINERS =
  /(?<=[\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])\u200d(?=\p{Extended_Pictographic})|(?<=[\p{Script=Arabic}\p{Script=Syriac}\p{Script=Mongolian}\p{Script=Devanagari}\p{Script=Bengali}\p{Script=Gurmukhi}\p{Script=Gujarati}\p{Script=Oriya}\p{Script=Tamil}\p{Script=Telugu}\p{Script=Kannada}\p{Script=Malayalam}\p{Script=Sinhala}])[\u200c\u200d](?=\p{L})/gu;

export function visible(text: string): string {
  const needed = new Set(/[\u200c\u200d]/.test(text) ? [...text.matchAll(JOINERS)].map((each) => each.index) : []);
  return text
    .replace(HIDDEN, (found, at: number) =>
      needed.has(at) ? found : `⟨U+${found.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
    )
    .toWellFormed();
}

/** A name that somebody else gave, for one place of a page: nothing hidden, on one line, and cut where it is long. */
export function named(text: string, most = 200): string {
  const cut = text.length > most ? `${text.slice(0, most)}… (${text.length.toLocaleString("en-US")} characters)` : text;
  return visible(cut.replace(/[\t\r\n]+/g, " "));
}
