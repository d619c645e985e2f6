// Arithmetic without eval, which the page's security policy forbids.

const TOKEN = /\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\*\*|[-+*/%^()])/y;
const MAX_DEPTH = 50;

/** The value of an expression of numbers, + - * / % ^ and parentheses. Throws for anything else. */
export function calculate(expression: string): number {
  const tokens: string[] = [];
  TOKEN.lastIndex = 0;
  const source = expression.trim();
  while (TOKEN.lastIndex < source.length) {
    const at = TOKEN.lastIndex;
    const match = TOKEN.exec(source);
    if (!match) throw new Error(`unexpected "${source.slice(at).trim()[0]}"`);
    tokens.push(match[1]!);
  }
  let next = 0;

  function sum(depth: number): number {
    let value = product(depth);
    while (tokens[next] === "+" || tokens[next] === "-") {
      value = tokens[next++] === "+" ? value + product(depth) : value - product(depth);
    }
    return value;
  }

  function product(depth: number): number {
    let value = signed(depth);
    for (;;) {
      const sign = tokens[next];
      if (sign !== "*" && sign !== "/" && sign !== "%") return value;
      next++;
      const by = signed(depth);
      value = sign === "*" ? value * by : sign === "/" ? value / by : value % by;
    }
  }

  function signed(depth: number): number {
    if (depth > MAX_DEPTH) throw new Error("nested too deep");
    if (tokens[next] === "-" || tokens[next] === "+") return tokens[next++] === "-" ? -signed(depth + 1) : signed(depth + 1);
    const base = atom(depth);
    if (tokens[next] !== "^" && tokens[next] !== "**") return base;
    next++;
    return base ** signed(depth + 1);
  }

  function atom(depth: number): number {
    const token = tokens[next++];
    if (token === "(") {
      const value = sum(depth + 1);
      if (tokens[next++] !== ")") throw new Error("a parenthesis is not closed");
      return value;
    }
    if (token === undefined || !/[\d.]/.test(token)) throw new Error(token ? `unexpected "${token}"` : "it ends too early");
    return Number(token);
  }

  const value = sum(0);
  if (next < tokens.length) throw new Error(`unexpected "${tokens[next]}"`);
  return value;
}
