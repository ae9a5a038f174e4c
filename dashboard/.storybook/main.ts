import type { StorybookConfig } from "@storybook/react-vite";

/** The shared parts of the page, each in the states that a run seldom shows. Nothing is sent to anyone. */
export default {
  framework: "@storybook/react-vite",
  stories: ["../src/**/*.stories.tsx"],
  previewHead: (head) => `${head}<link rel="icon" href="data:,">`, // else the browser asks for one that is not there
  typescript: { reactDocgen: false },
  core: { disableTelemetry: true, disableWhatsNewNotifications: true },
} satisfies StorybookConfig;
