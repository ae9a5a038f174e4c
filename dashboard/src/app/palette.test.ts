import assert from "node:assert/strict";
import { test } from "vitest";

import { palette } from "./palette.ts";

test("every colour has a contrast of 3 to 1 to the page in both themes", () => {
  for (const [name, colours] of Object.entries(palette)) {
    for (const [place, page] of ["#ffffff", "#242424"].entries()) {
      const [one, other] = [light(colours[place] ?? ""), light(page)].sort((a, b) => b - a) as [number, number];
      assert.ok((one + 0.05) / (other + 0.05) >= 3, `${name} on ${page}: ${(one + 0.05) / (other + 0.05)}`);
    }
  }
});

/** Relative luminance, as WCAG defines it. */
function light(colour: string): number {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5].map((at) => {
    const share = parseInt(colour.slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
