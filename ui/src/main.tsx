// The page's entry: starts the shell and connects to the server that served the page.
import { render } from "preact";
import { App } from "./app/App";
import { open } from "./app/session";
import "./style.css";

const place = document.getElementById("app")!;
place.replaceChildren(); // the page says there that it loads
render(<App />, place);
void open();
