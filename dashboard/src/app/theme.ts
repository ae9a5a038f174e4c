import { createTheme, localStorageColorSchemeManager } from "@mantine/core";

/** Where the chosen colour scheme is kept: a preference, no secret. */
export const colorSchemes = localStorageColorSchemeManager({ key: "agl-color-scheme" });

/** System fonts only: the page loads nothing from another host. */
export const theme = createTheme({
  primaryColor: "blue",
  autoContrast: true,
  defaultRadius: "sm",
  fontFamily: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif",
  fontFamilyMonospace: "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', Menlo, Consolas, monospace",
  respectReducedMotion: true,
  cursorType: "pointer",
});
