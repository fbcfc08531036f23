// Search in pages that are opened as files. The theme searches in a worker, which browsers do not
// start from a file; here a hidden frame runs the worker's script instead. (The theme would load
// such a script from another site.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.unsent = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      script.src = new URL(url, location);
      script.onload = () => {
        const messages = this.unsent;
        this.unsent = null;
        messages.forEach((data) => this.postMessage(data));
      };
      frame.contentDocument.body.append(script);
    }

    postMessage(data) {
      if (this.unsent) this.unsent.push(data);
      else this.scope.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
