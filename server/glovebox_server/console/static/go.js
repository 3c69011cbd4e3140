"use strict";
// Leads from a notification's link, as /go/waiting, to that page of the session that this browser has.
const place = localStorage.getItem("place");
const to = location.pathname.slice("/go/".length);
if (/^[0-9a-f]{32}$/.test(place ?? "") && /^(now|waiting|history|health|call\/c_[0-9a-z]{26})$/.test(to)) {
  location.replace(`/${place}/${to}`);
}
