import "@mantine/core/styles.layer.css";
import "../src/app/page.css";

import { MantineProvider, Title } from "@mantine/core";
import type { Preview } from "@storybook/react-vite";
import { createMemoryHistory, createRootRoute, createRouter, RouterProvider } from "@tanstack/react-router";

import { theme } from "../src/app/theme.ts";

/** Each story has the page's styles and theme, and a router for its links; the toolbar chooses light or dark. */
export default {
  globalTypes: { scheme: { toolbar: { title: "Scheme", items: ["light", "dark"], dynamicTitle: true } } },
  initialGlobals: { scheme: "light" },
  decorators: [
    (Story, { globals, name }) => (
      <MantineProvider theme={theme} forceColorScheme={globals.scheme === "dark" ? "dark" : "light"}>
        <RouterProvider
          router={createRouter({
            history: createMemoryHistory(),
            routeTree: createRootRoute({
              component: () => (
                <main>
                  <Title size="h5">{name}</Title>
                  {Story()}
                </main>
              ),
            }),
          })}
        />
      </MantineProvider>
    ),
  ],
} satisfies Preview;
