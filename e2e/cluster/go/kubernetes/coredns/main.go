// CoreDNS with the four plugins the cluster's DNS needs: a fraction of the full program to build.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/template"
)

func init() {
	// The order in which plugins see a query: the cluster's zone first, then the answer for everything else.
	dnsserver.Directives = []string{"bind", "errors", "kubernetes", "template"}
}

func main() {
	coremain.Run()
}
