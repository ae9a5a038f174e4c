/** The search part of an address: plain names and values, as a person would type them. */

export type SearchValues = Record<string, string | undefined>;

export function parseSearch(text: string): SearchValues {
  return Object.fromEntries(new URLSearchParams(text));
}

export function stringifySearch(values: Readonly<Record<string, string | number | null | undefined>>): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** A link within the page: parts of the path are escaped, empty values are left out. */
export function href(
  parts: readonly (string | number)[],
  search: Readonly<Record<string, string | number | null | undefined>> = {},
): string {
  return `#/${parts.map((each) => encodeURIComponent(String(each))).join("/")}${stringifySearch(search)}`;
}
