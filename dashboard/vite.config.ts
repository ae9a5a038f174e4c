import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

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
  server: { proxy: { "/v1": "http://127.0.0.1:4747", "/health": "http://127.0.0.1:4747" } },
});
