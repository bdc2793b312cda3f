// A stand-in for web workers, which browsers do not start for pages that are read from the disk: the
// script runs in a hidden frame. The search of the theme uses it.
if (location.protocol === "file:") {
  window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.isReady = new Promise((ready) => (frame.onload = ready))
      addEventListener("message", ({ source, data }) => {
        if (source === this.inside) this.dispatchEvent(new MessageEvent("message", { data }))
      })
      const tell = "postMessage = (data) => parent.postMessage(data, '*')"
      const page = frame.contentDocument
      page.open()
      page.write(`<script>${tell}<\/script><script src="${url}"><\/script>`)
      page.close()
    }

    postMessage(data) {
      this.isReady.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
