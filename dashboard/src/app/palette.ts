/**
 * Colours that people with any form of colour blindness tell apart (Okabe and Ito, 2008). A colour never carries a
 * meaning alone: a word, a sign or a pattern stands beside it.
 */
export const palette = {
  blue: "#0072B2",
  sky: "#56B4E9",
  orange: "#E69F00",
  vermilion: "#D55E00",
  green: "#009E73",
  purple: "#CC79A7",
  yellow: "#F0E442",
  grey: "#8A8A8A",
} as const;

/** The order in which series of one chart take their colours. */
export const series = [
  palette.blue,
  palette.orange,
  palette.green,
  palette.purple,
  palette.vermilion,
  palette.sky,
  palette.grey,
] as const;
