import { describe, expect, test } from "vitest";
import { isDrawable, texOf } from "./formulas";
import { htmlOf } from "./markdown";
import { SentenceReader } from "./sentences";
import { shortened, startOf } from "./shorten";
import { cutOf } from "./stream_text";

describe("sentences", () => {
  const read = (pieces: string[]) => {
    const reader = new SentenceReader();
    return [...pieces.flatMap((piece) => reader.push(piece)), ...reader.finish()];
  };

  test("are said whole, however the text is cut", () => {
    const source = 'It is 3.5 m long. "Really?" she said.\nYes! And then';
    const whole = ["It is 3.5 m long.", '"Really?"', "she said.", "Yes!", "And then"];
    expect(read([source])).toEqual(whole);
    expect(read([...source])).toEqual(whole);
  });

  test("f37: a text without an end is said in parts, with all of its words", () => {
    for (const source of ["x".repeat(1001), "word ".repeat(300), "\u{1f600}".repeat(501), `${"and so on ".repeat(90)}. Yes.`]) {
      for (const pieces of [[source], [...source], source.match(/.{1,7}/gsu)!]) {
        const parts = read(pieces);
        expect(parts.join("").replaceAll(" ", "")).toBe(source.replaceAll(" ", ""));
        expect(parts.every((part) => part.length <= 400 && part.isWellFormed())).toBe(true);
        if (source.startsWith("word")) expect(parts.join(" ")).toBe(source.trim());
      }
    }
  });

  test("f37: lines of markup are not said", () => {
    const source = "Here:\n\n```python\nx = 1\n```\n\n| a | b |\n|---|:-:|\n\n---\n\n👍\n***";
    for (const pieces of [[source], [...source]]) {
      expect(read(pieces)).toEqual(["Here:", "```python", "x = 1", "| a | b |", "👍"]);
    }
  });

  test("f37: sentences without spaces between them are said one by one", () => {
    for (const pieces of [["これは本です。「はい！」彼は"], [..."これは本です。「はい！」彼は"]]) {
      expect(read(pieces).map((part) => part.replace(/^」/, ""))).toEqual(["これは本です。", expect.stringMatching(/^「はい！」?$/), "彼は"]);
    }
  });
});

describe("markdown", () => {
  test("f37: of a model that repeats itself is shown in bounded time", () => {
    const plain = (html: string): string => html.replaceAll(/<[^>]*>/g, "");
    for (const part of ["_a_", " ", "**a *b ", "a ", "\n* a", "> a\n", "_a_\n\n", "$a", "\\(", "\n\\[a"]) {
      const source = `a${part.repeat(60_000 / part.length)}b`;
      expect(plain(htmlOf(source)!)).toContain("b");
    }
    expect(htmlOf(`**a** ${"_a_".repeat(20)}`)).toContain("<strong>a</strong>");
    expect(plain(htmlOf(`${"x<y ".repeat(3000)}\nend`)!)).toContain("x&lt;y");
  });

  test("f37: tells open tasks from done ones, and links to images", () => {
    const html = htmlOf("- [ ] open\n- [x] done\n\n![a <b>](http://x.y/?a=1&b=2) ![](http://x.y/)")!;
    expect(html).toMatch(/☐ +open/);
    expect(html).toMatch(/☑ +done/);
    expect(html).toContain('<a href="http://x.y/?a=1&amp;b=2">a &lt;b></a>');
    expect(html).toContain('<a href="http://x.y/">image</a>');
    expect(html).not.toMatch(/<(input|img)/);
  });

  const formula = (source: string): string => `<code data-formula="">${source.replaceAll("&", "&amp;")}</code>`;

  test("f37: formulas keep their source, which markdown does not read", () => {
    const inline = ["\\( a_1 * b_1 \\)", "$a_1 * b_2 * c$", "$x$", "$$a_1 + a_2$$", "\\[ \\{x_1, x_2\\} \\]", "$p = \\$5.00$", "$\\$$"];
    for (const source of inline) expect(htmlOf(`so ${source}, too`)).toContain(`so ${formula(source)}, too`);
    const displayed = "\\[\n\\begin{aligned} a_1 &= b_1\n- c\n+ d\n* e\n\\end{aligned}\n\\]";
    for (const before of ["", "so\n\n", "so\n", "so\n  ", "# so\n"]) {
      const html = htmlOf(`${before}${displayed}\ntoo`);
      expect(html).toContain(`<pre>${formula(displayed)}</pre>`);
      expect(html).toContain("<p>too</p>");
      expect(html).not.toContain("<li>");
    }
    expect(htmlOf(`- so\n  ${displayed.replaceAll("\n", "\n  ")}\n- too`)).toContain(formula(displayed));
  });

  test("f37: prices, variables of a shell and code are no formulas", () => {
    const prices = ["costs $5 and $10 more", "**$5**, **$6**", "US$5-$10", "5$, 6$.", "from 5$ to 6$", "$5 or \\$6, not $7", "from $5 to 10$.", "($20 a month or 200$)"];
    for (const text of [...prices, "$HOME and $PATH", "$a/$b", "`\\(a\\)` and `$a_1$`", "```\n$a$\n\\[a\\]\n```", "    \\[a\\]"]) {
      expect(htmlOf(text)).not.toContain("data-formula");
    }
  });

  test("f37: a formula that the text breaks off is shown as its source, also while the text grows", () => {
    const text = "so \\( a_1 * b_1 * c \\) and\n\n- $$\n  a_1 * b\n  - c\n  $$\n\nor\n\\[\na_1\n- b * c * d\n\\]\nend";
    for (let length = 0; length <= text.length; length++) {
      expect(htmlOf(text.slice(0, length))).not.toMatch(/<em>|<(li|ul)>\s*(<p>)?[bc]/);
    }
    expect(htmlOf("so \\( a_1 * b_1")).toContain("<code>\\( a_1 * b_1</code>");
    expect(htmlOf("\\[\na_1\n- b")).toContain("<pre><code>\\[\na_1\n- b</code></pre>");
    expect(htmlOf("\\[ a\n\n- b")).toContain("<li>b</li>");
    expect(htmlOf("an \\( *open* bracket\n\nin a text")).toContain("<em>open</em>");
    expect(htmlOf("kill $$ *now*")).toContain("<em>now</em>");
  });

  test("f37: a formula is drawn without its delimiters, if that takes a bounded time", () => {
    expect(["\\(a\\)", "$a$", "\\[a\\]", "$$a$$"].map(texOf)).toEqual(
      [false, false, true, true].map((isDisplay) => ({ tex: "a", isDisplay })),
    );
    for (const tex of ["a \\longrightarrow \\defeq \\{ \\left( \\{ \\right)", `${"\\sqrt{".repeat(15)}x${"}".repeat(15)}`, "{a}".repeat(99)]) {
      expect(isDrawable(tex)).toBe(true);
    }
    const nested = (open: string, close = "}"): string => `${open.repeat(25)}x${close.repeat(25)}`;
    const large = [nested("\\sqrt{"), nested("\\left(", "\\right)"), nested("\\begin{matrix}", "\\end{matrix}")];
    for (const tex of [...large, "\\llap{".repeat(4), "\\def\\a{b}", "\\newcommand{\\a}{b}", "\\gdef \\a{b}", "\\let\\a=b"]) {
      expect(isDrawable(tex)).toBe(false);
    }
  });

  test("f37: of quotes and lists that are too deep is none", () => {
    for (const part of [">", "1. "]) expect(htmlOf(part.repeat(5_000))).toBeNull();
  });
});

describe("cut texts", () => {
  test("f37: fit, are well-formed, and begin as the text does", () => {
    const texts = ["\u{1f600}".repeat(9), `a${"\u{1f600}".repeat(9)}`, "plain text", ""];
    for (const text of texts) {
      for (let most = 1; most < 22; most++) {
        const [cut, start] = [shortened(text, most), startOf(text, most)];
        expect(Math.max(cut.length, start.length)).toBeLessThanOrEqual(most);
        expect(cut.isWellFormed() && start.isWellFormed()).toBe(true);
        expect(text.startsWith(start) && text.startsWith(cut.replace("…", ""))).toBe(true);
        expect(cut === text).toBe(text.length <= most);
      }
    }
  });
});

describe("blocks", () => {
  const blocksOf = (pieces: string[]) => {
    const blocks = [""];
    for (let rest of pieces) {
      while (rest) {
        const cut = cutOf(blocks.at(-1)!.length, rest);
        blocks[blocks.length - 1] += rest.slice(0, cut ?? rest.length);
        rest = cut === null ? "" : rest.slice(cut);
        if (cut !== null) blocks.push("");
      }
    }
    return blocks;
  };

  test("lose nothing, stay short, and do not divide a character", () => {
    const line = "\u{1f600}".repeat(20_000);
    for (const pieces of [[line], [...line], Array.from({ length: 900 }, (_, index) => `line ${index}\n`)]) {
      const blocks = blocksOf(pieces);
      expect(blocks.join("")).toBe(pieces.join(""));
      expect(Math.max(...blocks.map((block) => block.length))).toBeLessThanOrEqual(8192);
      expect(blocks.every((block) => block.isWellFormed())).toBe(true);
    }
  });
});
