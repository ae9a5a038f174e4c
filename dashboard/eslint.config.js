import reactHooks from "eslint-plugin-react-hooks";
import { defineConfig, globalIgnores } from "eslint/config";
import tseslint from "typescript-eslint";

/** Beside the compiler: promises that nobody awaits, values of unknown type, and the rules of React's hooks. */
export default defineConfig([
  globalIgnores(["storybook-static", "eslint.config.js", "src/api/schema.d.ts"]),
  tseslint.configs.recommendedTypeChecked,
  reactHooks.configs.flat["recommended-latest"],
  {
    languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "@typescript-eslint/no-unnecessary-type-assertion": "off", // the router infers types from the assertion
      "@typescript-eslint/no-unused-vars": "off", // the compiler's noUnusedLocals, which knows names that begin with _
      "react-hooks/incompatible-library": "off", // is about React's compiler, which this page is built without
    },
  },
]);
