import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

const { AGL_SERVER_HOST = "127.0.0.1", AGL_SERVER_PORT = "4747" } = process.env;
const store = `http://${AGL_SERVER_HOST}:${AGL_SERVER_PORT}`;
const proxy = { "/v1": store, "/health": store };

/** The page is built into the Python package. Paths are relative, so that it also works below a proxy's prefix. */
export default defineConfig({
  base: "./",
  plugins: [react()],
  html: { cspNonce: "__CSP_NONCE__" },
  build: {
    outDir: "../agentlightning/dashboard/static",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: ["chrome123", "firefox128", "safari17.5"],
    sourcemap: false,
    assetsInlineLimit: 0,
    reportCompressedSize: true,
  },
  server: { proxy },
  preview: { proxy },
  test: { include: ["src/**/*.test.ts"] },
});
