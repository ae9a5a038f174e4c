/**
 * Colours that people with any form of colour blindness tell apart (Okabe and Ito, 2008), on a light and on a dark page;
 * each has a contrast of at least 3 to 1 to the page (WCAG 2.2, 1.4.11). A colour never carries a meaning alone: a word,
 * a sign or a pattern stands beside it.
 */
export const palette = {
  blue: ["#0072B2", "#3D9BD9"],
  sky: ["#2E8BC0", "#7CC8F2"],
  orange: ["#B36B00", "#E69F00"],
  vermilion: ["#D55E00", "#F0803C"],
  green: ["#008A64", "#2FBF93"],
  purple: ["#B0568A", "#D992BB"],
  yellow: ["#857A00", "#F0E442"],
  grey: ["#808080", "#A0A0A0"],
  slate: ["#555555", "#C9C9C9"],
} as const;

/** A colour on a light page, and on a dark one. */
export type Colour = readonly [string, string];

/** The order in which series of one chart take their colours. */
export const series: readonly Colour[] = [
  palette.blue,
  palette.orange,
  palette.green,
  palette.purple,
  palette.vermilion,
  palette.sky,
  palette.grey,
];
