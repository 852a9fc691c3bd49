//! One self-contained page: the timeline as inline SVG that can be zoomed, and the explanation. No other resource is needed.

use super::{Explanation, Subject, critical_chain};
use crate::cost::Nanos;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Height of a row, and of what is drawn in it.
const ROW: usize = 22;
const BAR: usize = 18;
/// Width of the drawing in its own units; times are scaled to it.
const WIDTH: f64 = 10_000.0;

/// The page of a placement with its explanation.
pub fn page(s: &Subject, e: &Explanation) -> String {
    let t = &s.solution.timeline;
    let title = escaped(s.name);
    let (algorithm, makespan) = (escaped(&s.solution.algorithm), t.makespan);
    let (bound, bound_name) = (s.solution.lower_bound, escaped(&s.solution.bound));
    let rows = Rows::new(s);
    let (svg, labels, text) = (rows.svg(s), rows.labels(), escaped(&e.to_string()));
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n<style>{STYLE}</style></head>\n<body>\n\
         <h1>{title}</h1>\n<p>{makespan} by {algorithm}; lower bound {bound} ({bound_name}). Wheel: zoom; drag: move; double click: all. \
         The outlined bars are the critical chain.</p>\n<p id=\"info\">&nbsp;</p>\n\
         <div id=\"chart\"><div id=\"labels\">{labels}</div><div id=\"view\">{svg}</div></div>\n<pre>{text}</pre>\n\
         <script>{SCRIPT}</script>\n</body></html>\n"
    )
}

/// Text in which nothing is markup.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' && c != '\t' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The devices, then the links that are used.
struct Rows {
    names: Vec<String>,
    links: Vec<(u32, u32)>,
    n_devices: usize,
}

impl Rows {
    fn new(s: &Subject) -> Rows {
        let links: BTreeSet<(u32, u32)> = s
            .solution
            .timeline
            .transfers
            .iter()
            .map(|x| (x.from, x.to))
            .collect();
        let links: Vec<(u32, u32)> = links.into_iter().collect();
        let name =
            |l: &(u32, u32)| format!("{} → {}", s.devices[l.0 as usize], s.devices[l.1 as usize]);
        let names = s
            .devices
            .iter()
            .cloned()
            .chain(links.iter().map(name))
            .collect();
        Rows {
            names,
            links,
            n_devices: s.devices.len(),
        }
    }

    fn labels(&self) -> String {
        self.names
            .iter()
            .map(|n| format!("<div>{}</div>", escaped(n)))
            .collect()
    }

    fn svg(&self, s: &Subject) -> String {
        let t = &s.solution.timeline;
        let chain = critical_chain(s.problem, t);
        let critical: BTreeSet<u32> = chain.tasks().collect();
        let critical_transfers: BTreeSet<u32> = chain.transfers().collect();
        let height = ROW * self.names.len();
        let mut out = format!(
            "<svg id=\"svg\" viewBox=\"0 0 {WIDTH} {height}\" height=\"{height}\" preserveAspectRatio=\"none\">"
        );
        for (i, label) in s.tasks.iter().enumerate() {
            let what = format!("{} {}", label.name, label.op);
            let class = if critical.contains(&(i as u32)) {
                "t c"
            } else {
                "t"
            };
            let bar = Bar {
                row: t.device[i] as usize,
                times: (t.start[i], t.end[i]),
                class,
                hue: hue(&label.op),
            };
            bar.write(&mut out, t.makespan, what.trim());
        }
        for (i, x) in t.transfers.iter().enumerate() {
            let row = self.n_devices + self.links.partition_point(|l| *l < (x.from, x.to));
            let bytes = s.problem.tensors[x.tensor as usize].bytes();
            let class = if critical_transfers.contains(&(i as u32)) {
                "x c"
            } else {
                "x"
            };
            let bar = Bar {
                row,
                times: (x.start, x.end),
                class,
                hue: 0,
            };
            bar.write(
                &mut out,
                t.makespan,
                &format!("transfer of {}, {bytes}", s.maker(x.tensor)),
            );
        }
        out.push_str("</svg>");
        out
    }
}

/// Something that happens in a row.
struct Bar {
    row: usize,
    times: (Nanos, Nanos),
    class: &'static str,
    hue: u32,
}

impl Bar {
    fn write(&self, out: &mut String, makespan: Nanos, what: &str) {
        let scale = |ns: Nanos| WIDTH * ns.0 as f64 / makespan.0.max(1) as f64;
        let (start, end) = self.times;
        let (x, width) = (scale(start), scale(end.saturating_sub(start)));
        let (y, class, hue) = (self.row * ROW + (ROW - BAR) / 2, self.class, self.hue);
        let written = write!(
            out,
            "<rect class=\"{class}\" x=\"{x:.3}\" y=\"{y}\" width=\"{width:.3}\" height=\"{BAR}\" fill=\"hsl({hue},60%,65%)\">\
             <title>{}: {start} to {end}</title></rect>",
            escaped(what)
        );
        written.expect("writing to a String does not fail");
    }
}

/// A colour of its own for each op.
fn hue(op: &str) -> u32 {
    op.bytes()
        .fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(u32::from(b)))
        % 360
}

const STYLE: &str = "body{font:14px sans-serif;margin:1em}#chart{display:flex;border:1px solid #999}#labels div{height:22px;line-height:22px;\
padding:0 6px;white-space:nowrap}#view{flex:1;overflow-x:auto;cursor:grab}#svg{display:block;width:100%;background:#f6f6f6}\
rect{stroke:#fff;stroke-width:1;vector-effect:non-scaling-stroke}rect.x{fill:#888}rect.c{stroke:#c00;stroke-width:2}\
pre{background:#f6f6f6;padding:1em;overflow-x:auto}#info{font-weight:bold}";

/// Zooms by making the drawing wider inside the view that scrolls.
const SCRIPT: &str = "var v=document.getElementById('view'),g=document.getElementById('svg'),i=document.getElementById('info'),z=1,d=null;\
function zoom(k,x){var p=(v.scrollLeft+x)/(v.clientWidth*z);z=Math.min(2000,Math.max(1,z*k));g.style.width=(100*z)+'%';\
v.scrollLeft=p*v.clientWidth*z-x}\
v.addEventListener('wheel',function(e){e.preventDefault();zoom(e.deltaY<0?1.25:0.8,e.clientX-v.getBoundingClientRect().left)},{passive:false});\
v.addEventListener('dblclick',function(){zoom(0,0)});\
v.addEventListener('mousedown',function(e){d=e.clientX+v.scrollLeft});\
window.addEventListener('mouseup',function(){d=null});\
v.addEventListener('mousemove',function(e){if(d!==null)v.scrollLeft=d-e.clientX;\
if(e.target.tagName==='rect')i.textContent=e.target.querySelector('title').textContent});";
