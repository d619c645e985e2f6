// The build writes agentflow/server/ui/static, which is committed. Names carry no hash, so that equal sources
// give equal files; the server sends an ETag with each.
import { fileURLToPath } from "node:url";
import { defineConfig } from "vitest/config";

const fromHere = (path: string) => fileURLToPath(new URL(path, import.meta.url));

export default defineConfig({
  base: "/ui/",
  resolve: { alias: { "agentflow-client": fromHere("../clients/typescript/src/index.ts") } },
  build: {
    outDir: fromHere("../agentflow/server/ui/static"),
    emptyOutDir: true,
    target: "es2024",
    // These know light-dark(); a substitute for older ones would ignore the theme that is chosen on the page.
    cssTarget: ["chrome123", "firefox120", "safari17.5"],
    // One file for all views: a view that is loaded again after the server was away would not get its own.
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: true,
    license: { fileName: "licenses.txt" }, // of the libraries in the built files
    rollupOptions: {
      output: {
        entryFileNames: "assets/[name].js",
        chunkFileNames: "assets/[name].js",
        assetFileNames: "assets/[name][extname]",
      },
    },
  },
  server: { host: "127.0.0.1", proxy: { "/v1": { target: "http://127.0.0.1:8410", ws: true } } },
  test: { include: ["src/**/*.test.ts"] },
});
